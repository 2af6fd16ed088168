"""Controlled comparisons: axes, trials, executors, selection and statistics. ``compare.py`` runs one."""
