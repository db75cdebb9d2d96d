"""Integrations: callbacks that add zcomm to training frameworks. Import the one you need.

    zcomm.integrations.lightning      a Callback for Lightning's Trainer
    zcomm.integrations.transformers   a TrainerCallback for Hugging Face's Trainer

Accelerate needs none: pass zcomm.compress the model that accelerator.prepare returns.

Imports: ddp and below. Start with registration.py, which both share.
"""
