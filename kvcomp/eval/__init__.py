"""Evaluation: tasks, grading, decoding, records of runs, and their figures. It needs the extra `kvcomp[eval]`."""
