"""The live screen of `drillyard watch`: a run followed in its files, or in mirrors of them."""
