"""What a person sees on the terminal: the bar while cells run, the table behind them.

Not here: tables over many runs (`plots/tables/`).
"""
