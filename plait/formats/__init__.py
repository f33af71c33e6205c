"""Pure readers and writers of other programs' files, one subpackage or module for each program."""
