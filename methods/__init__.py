"""Which tokens a query may attend to: the interface, full attention, a folder per family, and what needs no torch in
`rules`.

Not here: moving tokens, counting them, attending to them (`engine`).
"""

from kvbench.engine.terminal import refuse_without_packages

refuse_without_packages()
