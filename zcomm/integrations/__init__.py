"""zcomm inside of training frameworks, each imported by its name.

zcomm.integrations.lightning      a Callback of Lightning's Trainer
zcomm.integrations.transformers   a TrainerCallback of Hugging Face's Trainer

Accelerate needs none: zcomm.compress takes what accelerator.prepare returns.
"""
