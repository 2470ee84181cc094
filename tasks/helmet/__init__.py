"""HELMET, as far as no model judges it: many-shot labels, passages, ranking, JSON values."""
