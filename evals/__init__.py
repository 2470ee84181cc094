"""What is asked, how it is scored, and what is kept of a run: the runner, the results and one file per task.

Not here: how a model decodes (`engine`), what a method keeps (`methods`), summaries over runs (`plots`).
"""
