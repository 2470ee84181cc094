"""Words that ops take for what they shall do, where settings are checked before torch is imported.

Not here: what they mean; the files of the ops say it.
"""

METRICS = ("cosine", "l2", "dot")  # kmeans.py: what a key is near to
EMPTY = ("farthest", "keep")  # pq_fit.py: what becomes of an empty cluster
MERGES = ("softmax_sum", "logit_sum", "max", "per_query_head")  # pq_scores.py: how a group's heads become one score
