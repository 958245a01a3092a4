"""Who runs a target's forward: one file a runtime, behind the protocol of :mod:`drafter.runtimes.base`."""
