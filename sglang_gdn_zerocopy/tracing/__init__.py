"""Reading torch-profiler traces of an SGLang server: verify passes, launches per kernel, and two traces compared."""
