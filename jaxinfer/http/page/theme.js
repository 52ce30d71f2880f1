// Runs before the page is painted, so that a chosen theme does not flash.
try {
  const theme = JSON.parse(localStorage.getItem("jaxinfer.theme"));
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the system's theme */ }
