"""What a run achieved: summary.json, and a report as one HTML file. Figures come from
`measurement`."""
