"""What holds a layer's tokens: one class for each way in which they can lie, with one interface (`layer.py`).

Not here: which of them a method asks for (`engine/placement.py`), who makes them (`engine/store.py`).
"""
