"""The native runtime: files, families of models, and the step on a CPU."""
