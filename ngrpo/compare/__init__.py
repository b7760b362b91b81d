"""`ngrpo compare`: several strategies and seeds under one trainer, with intervals, costs and a report."""
