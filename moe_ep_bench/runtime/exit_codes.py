"""Exit statuses of every command, and of the ranks."""

OK = 0
CASES_FAILED = 1  # the job went through, but some cases have a reason instead of times
USER_ERROR = 2  # one line was printed that says what to change
CLOSED = 138  # asked to (SIGUSR1), ended between comparisons; the same command does the rest (128 + the signal)
LOST = 75  # a rank lost the process group; a new job goes on with the next case (EX_TEMPFAIL)
