"""InfiniteBench: the task, its prompts, scores and generators."""
