"""Harnesses that end processes, and make the kernel answer with errors, at every system call of every phase.

saver     a save as ``dcp/writer.py`` does it, without torch: starts in milliseconds
phases    save, overwrite, drain, restore, fetch, retention, resume: what stands before and after each
child     forked processes, alone or under strace, which kills them or answers for the kernel
calls     what strace wrote: the system calls on our files, and what may be injected where
checker   what must hold afterwards, whatever happened
bugs      seeded bugs; each harness must find those it is there for
races     many processes that save to one id: ``python -m tests.fault.sweep.races FOLDER RACES``
run       the program: ``python -m tests.fault.sweep.run kills|errnos|bugs FOLDER``
"""
