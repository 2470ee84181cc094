"""A task of the user's own: `task.py` reads its YAML file, `scorers.py` has the scores that it can name."""
