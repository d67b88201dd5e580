//! Figures as tables that go into the documentation as they are, or as JSON.

use serde::Serialize;

#[derive(Default, Serialize)]
pub struct Report {
    sections: Vec<Section>,
    targets: Vec<Target>,
}

#[derive(Serialize)]
struct Section {
    title: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

#[derive(Serialize)]
struct Target {
    what: String,
    wanted: String,
    measured: String,
    met: bool,
}

impl Report {
    pub fn section(&mut self, title: &str, columns: &[&str], rows: Vec<Vec<String>>) {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        self.sections.push(Section { title: title.to_owned(), columns, rows });
    }

    pub fn at_least(&mut self, what: &str, wanted: f64, measured: f64) {
        self.target(what, format!("at least {wanted:.2}"), format!("{measured:.2}"), measured >= wanted);
    }

    pub fn at_most(&mut self, what: &str, wanted: f64, measured: f64) {
        self.target(what, format!("at most {wanted:.2}"), format!("{measured:.2}"), measured <= wanted);
    }

    fn target(&mut self, what: &str, wanted: String, measured: String, met: bool) {
        self.targets.push(Target { what: what.to_owned(), wanted, measured, met });
    }

    pub fn has_missed(&self) -> bool {
        self.targets.iter().any(|target| !target.met)
    }

    pub fn print(&self, json: bool) {
        if json {
            println!("{}", serde_json::to_string_pretty(self).expect("figures can be written"));
            return;
        }
        for section in &self.sections {
            println!("\n### {}\n", section.title);
            table(&section.columns, &section.rows);
        }
        let met = |target: &Target| if target.met { "met" } else { "MISSED" }.to_owned();
        let columns = ["target", "wanted", "measured", ""].map(str::to_owned);
        let row = |t: &Target| vec![t.what.clone(), t.wanted.clone(), t.measured.clone(), met(t)];
        let rows: Vec<_> = self.targets.iter().map(row).collect();
        println!("\n### Targets\n");
        table(&columns, &rows);
    }
}

fn table(columns: &[String], rows: &[Vec<String>]) {
    println!("| {} |", columns.join(" | "));
    println!("|{}", "---|".repeat(columns.len()));
    for row in rows {
        println!("| {} |", row.join(" | "));
    }
}

/// The middle of what was measured.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    match figures.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => figures[count / 2],
        count => f64::midpoint(figures[count / 2 - 1], figures[count / 2]),
    }
}
