"""Predictions before money is spent: how often a run fails, when it should save, and what failures leave of its time.

Every answer is made of terms that carry formula and sources. Nothing here imports torch.
"""
