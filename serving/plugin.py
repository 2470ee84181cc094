"""vLLM's entry point of the group `vllm.general_plugins`, called in every process that vLLM starts.

Without an order (`serving/order.py`) it changes nothing: an installed plugin is nobody's business until it is asked.
"""
# pyright: reportMissingImports=false

from kvbench.serving.order import Order


def register() -> None:
    """Put our attention in the place of vLLM's own on a CPU."""
    order = Order.given()
    if order is None:
        return
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvbench.serving.adapter import VERSION, known

    if not known(vllm.__version__):
        raise ImportError(f"vLLM {vllm.__version__} is not known to kvbench's plugin, which was made for {VERSION}*")
    take_back()
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvbench.serving.adapter.attention.Backend")
    from kvbench.serving.adapter.blocks import register_manager

    register_manager()


def take_back() -> None:
    """vLLM's own attention again, and chosen anew: engines of this process before took ours, or were without."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from kvbench.serving.adapter.blocks import take_back_manager

    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    take_back_manager()
