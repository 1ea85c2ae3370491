"""Judge policies inside Hugging Face language models: what they cost the answers, on a text and on tasks.

``config``, ``session``       the config file; the comparisons of its sweep, and the command that goes through them
``text``, ``tasks``           what a comparison evaluates: a text's next tokens, or a task of the lm-evaluation-harness
``checkpoint``                a model on disk, and how its routers choose
``routed``                    a policy patched into the routers by hooks, and metrics of what it did
``recording``                 what the routers chose, as a moe-trace-v1 file, and how alike the experts are

Nothing outside this folder imports transformers, and nothing in it is needed to time a layer.
"""
