"""Any framework's logs -> steps, statistics, goodput, cost; comparison of runs."""
