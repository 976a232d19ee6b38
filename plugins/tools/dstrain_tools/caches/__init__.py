"""Commands of `dstrain cache` beyond listing, checking and pruning: show, export, import."""
