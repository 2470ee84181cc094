"""Which tokens a query may attend to: the interface and one file per method.

Not here: moving tokens, counting them, attending to them (`engine`).
"""
