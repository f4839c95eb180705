"""Harnesses that kill processes, and inject errors of the kernel, at each system call of each phase.

saver     a save as ``dcp/writer.py`` does it, but without torch: starts in milliseconds
phases    save, overwrite, drain, restore, fetch, retention, resume, with the states before and after each
child     forked processes, alone or under strace, which kills them or injects results
calls     the log of strace: system calls on files of the test, and the possible injections
checker   invariants that hold after every fault
bugs      seeded bugs; each harness must find its own
races     concurrent saves to one checkpoint: ``python -m tests.fault.sweep.races FOLDER RACES``
run       the program: ``python -m tests.fault.sweep.run kills|errnos|bugs FOLDER``
"""
