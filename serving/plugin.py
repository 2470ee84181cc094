"""vLLM's entry point of the group `vllm.general_plugins`, called in every process that vLLM starts.

Without an order (`serving/order.py`) it changes nothing: an installed plugin is nobody's business until it is asked.
"""
# pyright: reportMissingImports=false

from kvbench.serving.adapter.versions import need_vllm
from kvbench.serving.order import Order


def register() -> None:
    """Put our attention in the place of vLLM's own."""
    order = Order.given()
    if order is None:
        return
    need_vllm()
    from kvbench.serving.adapter.backends import put, take_back

    take_back()
    put()
    from kvbench.serving.adapter.blocks import register_manager

    register_manager()
