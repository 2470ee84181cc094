"""What each method may be asked for, and what it makes of a budget: parameters, integers, refusals, without torch.

A file per method, in the folder of its family and called as the method's own, with one class `<Method>Rules` that the
method inherits from: so a wrong value is answered before torch is imported. A method without such a file holds its
rules itself.

Not here: what a method does with tokens (`methods/dropping`, `methods/retrieving`).
"""
