"""BABILong: questions of bAbI's kind, whose facts are hidden in a long text."""
