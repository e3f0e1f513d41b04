"""Stage 3, the only place that spells an SGLang name."""
