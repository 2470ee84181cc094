"""Work that may hang, take all memory or end its process, in one of its own: `limited.py` asks, `serve.py` replies.

Not here: what is asked (`tasks/reasoning/grade.py`, `tasks/ifeval_system/grade.py`, and
`engine/checkpoints/trial.py`, each a module that serves).
"""
