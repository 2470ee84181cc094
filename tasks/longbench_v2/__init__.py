"""LongBench v2: 503 questions with four choices on texts from 8k to 2M words."""
