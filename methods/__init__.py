"""Which tokens a query may attend to: the interface, full attention, and a folder per family of methods.

Not here: moving tokens, counting them, attending to them (`engine`).
"""
