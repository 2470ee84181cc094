"""Agent traces: what an agent did is fixed, and at each of its decisions a method gives the next action."""
