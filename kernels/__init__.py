"""Fast ops, one file each: a plain reference, its fast paths, and one public function that picks between them.

Not here: anything that knows a method or a model. Attention over chosen tokens is plain torch so far, in
`engine/attend.py`.
"""
