"""What can be measured: ``run`` times a real expert-parallel layer on real ranks."""
