"""What a person sees on the terminal: the bar while cells run, the table after them.

Not here: tables over many runs (`plots/tables/`).
"""
