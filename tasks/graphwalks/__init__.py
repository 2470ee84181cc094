"""GraphWalks: nodes of a graph that is given by its edges."""
