"""The front end's calls on workers, whichever process they are in: `Extension`.

Not here: attention (`serving/adapter/attention.py`).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

from kvbench.engine.softmax import Softmax
from kvbench.serving.adapter.attention import Builder, number_of
from kvbench.serving.order import Order
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
            check(name, layer)
            pages[number_of(name)] = Pages.of(layer.kv_cache)
            impl = layer.impl
            sink = None if impl.sinks is None else impl.sinks.float()
            softmax[number_of(name)] = Softmax(impl.scale, float(impl.logits_soft_cap), sink)
        if [*sorted(pages)] != [*order.chosen.shape.attention_layers]:
            raise ValueError(f"vLLM has the layers {sorted(pages)}, and the method's model has others")
        is_shared = bool(self.vllm_config.cache_config.enable_prefix_caching)
        self.kvbench_desk = Desk(order, pages, softmax, is_shared)
        for group in self.model_runner.attn_groups:
            for one in group:
                for builder in one.metadata_builders:
                    assert isinstance(builder, Builder), type(builder)
                    builder.desk, builder.runner = self.kvbench_desk, self.model_runner
        return len(pages)

    def kvbench_told(self) -> dict[str, Any]:
        return self.kvbench_desk.told()


def check(name: str, layer: Any) -> None:
    """`ValueError` where a layer is none that pages are known of."""
    impl, isa = layer.impl, getattr(layer, "isa", None)
    says = [
        ("has a sliding window", impl.sliding_window != -1),
        ("reads another layer's pages", impl.kv_sharing_target_layer_name is not None),
        ("has ALiBi's slopes", impl.alibi_slopes is not None),
        (f"lies in pages of {isa}, of which only vec (dtype=float32) is known", isa != "vec"),
        ("is no layer of a decoder", f"{impl.attn_type}".lower().rpartition(".")[2] != "decoder"),
    ]
    for what, is_so in says:
        if is_so:
            raise ValueError(f"layer {name} {what}; serve another model, or without a method")
