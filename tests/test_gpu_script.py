"""The GPU's benchmark runs from end to end without one, on small shapes and in Triton's interpreter."""

import pytest

from benchmarks import gpu
from kernels.jit import triton


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.skipif(gpu.torch.cuda.is_available(), reason="python -m benchmarks.gpu itself runs")
def test_kernels_agree_with_their_references(capsys) -> None:
    assert gpu.main(["--device", "cpu", "--small", "--only", "copies", "kernels"]) == 0
    shown = capsys.readouterr().out
    for op in (
        "select_attend",
        "attend_codes",
        "page_bounds",
        "page_scores",
        "kmeans",
        "cluster_tokens",
        "pq_fit",
        "pq_top",
    ):
        assert op in shown
    assert "WRONG" not in shown


def test_a_method_that_runs_out_of_memory_is_a_result(capsys, monkeypatch) -> None:
    from evals.tasks import latency

    read = latency.read

    def short_of_memory(model, timed, ids, n_new):
        if timed.variant.observations:
            raise MemoryError("too many")
        return read(model, timed, ids, n_new)

    monkeypatch.setattr(latency, "read", short_of_memory)
    words = [
        "--device",
        "cpu",
        "--small",
        "--only",
        "methods",
        "--methods",
        "streamingllm",
        "snapkv",
    ]
    assert gpu.main([*words, "--lengths", "128", "--n-new", "4", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "StreamingLLM: decode" in shown and "TT2T" in shown and "oom" in shown


def test_without_a_gpu_it_says_so(capsys) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
