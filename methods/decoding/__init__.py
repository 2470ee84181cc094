"""Methods that compress while the model answers: prompt and generated tokens share one budget.

Not here: methods whose budget is of the prompt alone (`methods/dropping`, `methods/retrieving`).
"""
