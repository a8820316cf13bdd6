// Light, dark, or as the system says. The choice is kept in this browser.

const CHOICES = ["auto", "light", "dark"];
const LABELS = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };

export function beginTheme(button) {
  let choice = localStorage.getItem("theme") ?? "auto";
  const show = () => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = LABELS[choice];
    button.setAttribute("aria-label", `Colours: ${choice}. Change`);
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem("theme", choice);
    show();
  });
  show();
}
