"""Acceptance: what nodes are, measured on them, judged here against published figures and physical
bounds."""
