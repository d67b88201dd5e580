use idem_macros::idempotent;

#[idempotent(key = "header:id", consumer = "invoice")]
async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    let local = std::rc::Rc::new(());
    std::future::ready(()).await;
    drop(local);
    Ok(())
}

fn main() {}
