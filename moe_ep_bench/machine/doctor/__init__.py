"""``doctor``: what this machine can do, and what each part that it lacks costs.

Whoever queued for a node wants to know before the night, not after it, that a driver is lost, a GPU capped, a directory
another run's or a config too large. Every check answers with findings (``findings``): what is so, what that means for a
run, and what to do. Checks go by topic: ``packages``, ``gpus``, ``network``, ``exchange``, ``memory``, ``directory``.

Nothing here may hang or take the others down with it, not even a driver that never answers or a torch that cannot be
imported. So this process imports neither torch nor Megatron-Core and asks no driver; all that does runs in processes
of their own, each with a time limit (``child``).
"""
