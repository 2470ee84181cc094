"""vLLM's OpenAI-compatible server with a method inside: `serve`.

Not here: the command line (`serving/serve.py`).
"""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.serving.adapter.front import engine_flags, guard
from kvbench.serving.adapter.versions import need_vllm
from kvbench.serving.order import Order


def serve(order: Order | None, model: str, name: str, host: str, port: int, flags: Mapping[str, Any]) -> bool:
    """Serve until a signal comes, or until the engine dies: whether it lived. `name` is the model's in `/v1/models`."""
    made = engine_flags(order, flags)
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--model", model, "--served-model-name", name, "--host", host, "--port", f"{port}"]
    arguments = import_module(need_vllm().arguments)
    args = arguments.make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    for key, value in made.items():
        if not hasattr(args, key):
            raise ConfigError(f"vllm.{key} is no flag of vLLM's server; vllm serve --help=all lists them")
        setattr(args, key, value)
    arguments.validate_parsed_serve_args(args)

    async def run() -> bool:
        try:
            address, sock = setup_server(args, reuse_port=False)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be had: {error.strerror}; use port= with another"
            ) from None
        say(f"serving {name} on http://{host}:{port}/v1 once vLLM has started")
        async with build_async_engine_client(args) as engine:
            if order is not None:
                await engine.collective_rpc("kvbench_open")
                guard(engine, order)
            stopped = await build_and_serve(engine, address, sock, args)
            lived = not engine.errored
        try:
            await stopped
        finally:
            sock.close()
        return lived

    return asyncio.run(run())
