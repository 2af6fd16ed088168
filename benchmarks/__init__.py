"""Benchmarks: ``python -m benchmarks.<name>``. Ratios from one interleaved run; absolute times mean little."""
