"""A method's own file inside vLLM: what it keeps and finds there, in vLLM's pages and with vLLM's scheduler.

Three rungs. On `visible` all pages stay, and a step attends to what the method selects: it saves no memory. On `pages`
vLLM's own kernel reads whole pages that the method selects, by a table for each request and KV head. On `dropping`
what survives the prompt moves to blocks of the request's own, and the prompt's go back to vLLM's pool.

`adapter` alone imports vLLM; `python -m kvbench.serving.serve` is a server, and `task=serving` measures. vLLM lives in
an environment of its own, `make setup-serving`.

Not here: methods, their budgets and books, which are those of the harness.
"""
