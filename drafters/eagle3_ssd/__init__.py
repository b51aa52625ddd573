"""The EAGLE-3 drafter for SSD: model, slot alignment, vocabulary map, outcomes and checkpoint, agreed on by training
and serving.
"""
