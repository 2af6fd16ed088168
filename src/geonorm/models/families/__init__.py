"""Families of models: one file each, naming where the family keeps its parts."""
