"""The front end's calls on workers, whichever process they are in: `Extension`.

Not here: attention (`serving/adapter/attention.py`).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

from kvbench.engine.softmax import Softmax
from kvbench.serving.adapter.attention import Ours, Planning, number_of
from kvbench.serving.order import PAGES, Order
from kvbench.serving.pages import Pages
from kvbench.serving.reader import Desk


class Extension:
    """Methods of every worker."""

    def kvbench_open(self) -> int:
        """Let the method take requests over from now on: the number of layers."""
        order = Order.given()
        assert order is not None, "a worker without an order"
        layers = self.vllm_config.compilation_config.static_forward_context
        pages, softmax = {}, {}
        for name, layer in layers.items():
            check(name, layer, order.rung)
            pages[number_of(name)] = Pages.of(layer.kv_cache, layer.attn_backend.layout)
            impl = layer.impl
            sink = None if impl.sinks is None else impl.sinks.float()
            softmax[number_of(name)] = Softmax(impl.scale, float(impl.logits_soft_cap or 0), sink)
        if [*sorted(pages)] != [*order.chosen.shape.attention_layers]:
            raise ValueError(f"vLLM has the layers {sorted(pages)}, and the method's model has others")
        block, given = next(iter(pages.values())).block, self.vllm_config.cache_config.block_size
        if block != given:
            raise ValueError(
                f"vLLM's kernel has blocks of {block} tokens and its scheduler of {given}; set one for both"
            )
        is_shared = bool(self.vllm_config.cache_config.enable_prefix_caching)
        self.kvbench_desk = Desk(order, pages, softmax, is_shared)
        for group in self.model_runner.attn_groups:
            for one in group:
                for builder in one.metadata_builders:
                    assert isinstance(builder, Planning), type(builder)
                    builder.desk, builder.runner = self.kvbench_desk, self.model_runner
        return len(pages)

    def kvbench_told(self) -> dict[str, Any]:
        return self.kvbench_desk.told()


def check(name: str, layer: Any, rung: str) -> None:
    """`ValueError` where a layer is none that pages are known of."""
    impl, backend = layer.impl, layer.attn_backend
    if not issubclass(backend, Ours):
        raise ValueError(
            f"layer {name} has vLLM's backend {backend.get_name()}, which the adapter has no own in place of"
        )
    unknown = backend.unknown_layout(layer)
    says = [
        ("has a sliding window", impl.sliding_window not in (-1, (-1, -1))),
        ("reads another layer's pages", impl.kv_sharing_target_layer_name is not None),
        ("has ALiBi's slopes", impl.alibi_slopes is not None),
        (f"lies in pages of {unknown}", unknown is not None),
        (
            "is no layer of a decoder",
            f"{getattr(impl, 'attn_type', 'decoder')}".lower().rpartition(".")[2] != "decoder",
        ),
        ("has a kernel that reads no pages of one head (rung=pages)", rung == PAGES and not impl.reads_tables),
        ("has sinks of query heads (rung=pages)", rung == PAGES and impl.sinks is not None),
    ]
    for what, is_so in says:
        if is_so:
            raise ValueError(f"layer {name} {what}; serve another model, on another rung, or without a method")
