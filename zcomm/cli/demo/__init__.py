"""`zcomm demo`: the same training four ways on two hosts with a slow link, and a report."""
