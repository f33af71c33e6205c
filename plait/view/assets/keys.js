// Keys on figures: what is pressed while a figure has the focus goes to the server, which knows what is drawn.
// All of the latest keys go each time: Dash drops an answer if it asks again before it has it.
// And the figures below the heat map come once that is painted; the one in three dimensions when it first comes
// into view.
(function () {
  "use strict";
  var timer = window.setInterval(function () {
    var grid = document.getElementById("grid");
    if (!grid || !document.querySelector("#heat-figure .main-svg")) { return; }
    window.clearInterval(timer);
    window.dash_clientside.set_props("painted", {data: true});
    var watcher = new IntersectionObserver(function (entries) {
      if (entries.some(function (one) { return one.isIntersecting; })) {
        watcher.disconnect();
        window.dash_clientside.set_props("seen", {data: true});
      }
    });
    watcher.observe(grid);
  }, 50);
  var taken = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End", "Enter",
               "+", "=", "-", "0", "n", "b"];
  var count = 0;
  var latest = [];
  document.addEventListener("keydown", function (event) {
    var box = event.target.closest && event.target.closest("[data-keys]");
    if (!box || event.ctrlKey || event.metaKey || event.altKey || taken.indexOf(event.key) < 0) { return; }
    event.preventDefault();
    count += 1;
    latest = latest.concat([[box.getAttribute("data-keys"), event.key]]).slice(-64);
    window.dash_clientside.set_props("keys", {data: {count: count, latest: latest}});
    if (event.key === "Enter" && box.id === "heat-box") {
      var next = document.getElementById("time-box");
      if (next) { next.focus(); next.scrollIntoView({block: "center"}); }
    }
  });
})();
